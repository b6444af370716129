"""Print the totals of a folder of JUnit files; fail where a run is missing or nothing ran."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

RUNS = ("main", "transformers-519", "extras", "vllm-*")


def main(folder: Path) -> int:
    """Print one line for each run and one for all."""
    passed = failed = skipped = 0
    for run in RUNS:
        files = sorted(folder.glob(f"{run}.xml"))
        if not files:
            print(f"{run}: did not run")
            failed += 1
            continue
        roots = [ElementTree.parse(file).getroot() for file in files]
        suites = [suite for root in roots for suite in root.iter("testsuite")]
        total, bad, left_out = (
            sum(int(suite.get(key, 0)) for suite in suites for key in keys)
            for keys in (("tests",), ("failures", "errors"), ("skipped",))
        )
        failed += total == 0  # a run without tests is a run that is broken
        seconds = sum(float(suite.get("time", 0)) for suite in suites)
        print(f"{run}: {total} tests in {seconds:.0f} s")
        passed, failed, skipped = passed + total - bad - left_out, failed + bad, skipped + left_out
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
