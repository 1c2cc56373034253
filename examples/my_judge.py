"""A judge for `studies/judge.py`: it reads a JSON object per line and writes one, here by the length of answers."""

import json
import sys

for line in sys.stdin:
    asked = json.loads(line)
    if "a" in asked:
        longer = len(asked["a"]) - len(asked["b"])
        said = {"winner": "a" if longer > 0 else "b" if longer < 0 else "tie"}
    else:
        said = {"score": min(10, len(asked["answer"].split()))}
    print(json.dumps({"id": asked["id"], **said}), flush=True)
