#!/bin/sh
# Lists the functions that version 1 of the interface has.
exec sed -n '/^typedef/d; s/^[a-z].*[ *]\(hoistway_[a-z0-9_]*\)(.*)$/\1/p' "$(dirname "$0")/abi/1.txt" | sort -u
