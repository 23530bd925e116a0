#!/bin/sh
# Fails when a package whose logic is pure falls under its floor of covered lines.
set -eu
coverage="$1"
for package in canonicalizer policies engine/core; do
  echo "== coverage of $package (floor 95 % of lines)"
  "$coverage" report --include="$package/*" --fail-under=95 --skip-covered
done
