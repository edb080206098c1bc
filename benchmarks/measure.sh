#!/bin/sh
# Measure what docs/results shows of the bundled models, one after the other: benchmarks/measure.sh [the python of fly]
set -eu
cd "$(dirname "$0")/.."
python=${1:-python}
results=docs/results
export COLUMNS=100

measure() { # a name, and a command of python -m
    name=$1
    shift
    shown=$*
    case $1 in benchmarks.*) shown="python -m $*" ;; esac
    echo "$(date +%T) $name: $shown"
    { echo "\$ $shown"; "$python" -m "$@" 2>/dev/null; } > "$results/$name.txt"
}

measure speed fly bench speed --policy fly --plot "$results/speed.svg"
measure speed-8bit fly bench speed --policy fly --kernels w8a8 --shape none
measure twins benchmarks.twins --policy fly --k 11 --k 13 --k 15 --k 23 --k 25
measure twins-8bit benchmarks.twins --policy fly --k 11 --k 13 --k 15 --k 25 --k 27 --kernels w8a8
measure batch benchmarks.batch --policy fly
measure demo fly demo
