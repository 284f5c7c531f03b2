"""Tests of the repository itself: rooms, import edges, BUILD, and what the README promises."""
