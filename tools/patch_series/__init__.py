"""Writes the changes as patches for a Megatron-LM checkout, for those who keep a tree of their own.

``series`` says which changes each patch makes, ``contents`` makes the files that a checkout has with each of them, with
``splice`` and ``imports``, and ``write`` makes ``git`` write the patches.
"""
