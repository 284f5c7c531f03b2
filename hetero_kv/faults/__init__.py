"""Faults put to cached state on purpose, and the checks that must find them.

`kinds` says what can go wrong with which contract, when, and which check stands guard; `forge` and
`places` do it; `checks` switches one check off; `trial` serves a request under a fault.
"""
