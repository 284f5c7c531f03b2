"""Device pages: pools of entries that sequences share through block tables.

layout.py says how large pages are, table.py is the page table and its pure functions, cache.py
puts both into the cache of a model, views.py serves attention, validate.py checks at use.
"""
