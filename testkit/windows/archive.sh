#!/usr/bin/env bash
# Stands for an archiver where nothing is linked: makes an empty file of the name that it is given, as ar or as Microsoft's lib.
for argument in "$@"; do
    case $argument in
        -out:* | /out:*) : >"${argument#?out:}" ;;
        *.a) : >"$argument" ;;
    esac
done
