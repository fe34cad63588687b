"""Run models without a family by transformers' classes, with this package's attention and weight forms.

Imported only when a model needs it: transformers takes 1.8 s to import, and is an extra.
"""
