"""Hold the forms of weights, one file each, which :mod:`paged_sdk.quant.form` finds by listing this package."""
