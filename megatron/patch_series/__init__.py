"""Writes the changes as patches for a Megatron-LM checkout, for those who keep a tree of their own.

``contents`` makes the files that the checkout is to have, ``write`` makes ``git`` write the patches.
"""
