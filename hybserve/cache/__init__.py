"""Who owns which page and which slot: integer ids only, no tensors and no files.

pool        ids, free or held, with fences
integrity   free ⊎ owned = all, as sets
"""
