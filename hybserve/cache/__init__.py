"""Who owns which page and which slot: integer ids only, no tensors and no files.

pool        ids, free or held, with fences
node        a run of tokens in the prefix tree, its pages and its checkpoint
tree        the prefix tree: match, lease, publish, attach, evict
worth       what is evicted first
integrity   free ⊎ owned = all, as sets
"""
