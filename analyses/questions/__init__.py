"""The paper's open questions, a folder each; `perturbkv.analyses` has the questions that it answers."""
