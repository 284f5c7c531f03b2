"""The lightning indexer of one query a sequence: scores entries by index keys, picks the top k."""
