"""The engine joins the scheduler to the runner in one ``step()``, and tells listeners of new tokens."""
