"""Operations on plain tensors: the torch reference of each, and native kernels beside it."""
