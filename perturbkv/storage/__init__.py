"""Files that runs write and analyses read: traces, answers and patching measurements."""
