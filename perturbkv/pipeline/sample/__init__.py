"""One sample: prefill, kept sets of every layer, one decode step with each cache, the arrays of its trace."""
