"""Define the forms of weights, one per file. :mod:`paged_sdk.quant.form` discovers them by listing this package."""
