"""Turn conversations into tokens and tokens into text: chat templates, tokenizers, incremental detokenization, stop
strings. Needs no torch.
"""
