"""The engine: one ``step()`` that joins the scheduler to the runner and tells listeners of new tokens."""
