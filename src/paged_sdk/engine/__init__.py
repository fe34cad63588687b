"""Joins the scheduler to the runner in one ``step()``, and sends new tokens to listeners."""
