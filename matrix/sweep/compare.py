"""`python -m matrix.sweep.compare NEW.json`: is what a sweep found what COMPATIBILITY.md says? With --update, make it so."""

import argparse
import json
import sys
from pathlib import Path

from . import report


def main() -> int:
    """Fails if a class fares otherwise than recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", type=Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    sweep = json.loads(options.new.read_text())
    release, found = sweep["transformers"], report.compact(sweep["results"])
    file = report.RESULTS / f"{release}.json"
    if options.update:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")
        report.main()
        return 0
    if not file.exists():
        print(f"transformers {release} is not in COMPATIBILITY.md; nothing to compare with")
        return 0
    recorded = json.loads(file.read_text())
    changed = [name for name in {**recorded, **found} if recorded.get(name, [""])[0] != found.get(name, [""])[0]]
    for name in changed:
        print(f"STALE {name}: COMPATIBILITY.md says {recorded.get(name)}, now {found.get(name)}")
    if changed:
        print(f"run: nox -s \"sweep-3.11(transformers='{release}')\" -- --update")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
