"""The engine: one ``step()`` that joins the scheduler to the runner and turns tokens into text."""
