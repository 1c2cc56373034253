"""Files that runs write and analyses read: traces, answers, judgements and patching measurements."""
