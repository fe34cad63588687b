"""Forms of weights, one file each, found by being here: see :mod:`paged_sdk.quant.form`."""
