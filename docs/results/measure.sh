#!/bin/sh
# Measure everything that README.md here shows, one after the other: docs/results/measure.sh [the fly command]
set -eu
fly=${1:-fly}
here=$(dirname "$0")
export COLUMNS=100

measure() {
    name=$1
    shift
    echo "$(date +%T) $name: fly $*"
    { echo "\$ fly $*"; "$fly" "$@" 2>/dev/null; } > "$here/$name.txt"
}

measure speed bench speed --policy fly --plot "$here/speed.png"
measure speed-8bit bench speed --policy fly --kernels w8a8 --shape none
measure peers bench peers --policy fly --turns 5
measure peers-8bit bench peers --policy fly --turns 5 --kernels w8a8
measure peers-110m bench peers --shape 768x12x32000 --problems 4 --tokens 100
measure peers-110m-8bit bench peers --shape 768x12x32000 --problems 4 --tokens 100 --kernels w8a8
"$(dirname "$(command -v "$fly")")/python" "$here/start.py" > "$here/start.txt"
measure twins bench twins --policy fly --k 11 --k 13 --k 15 --k 23 --k 25
measure twins-8bit bench twins --policy fly --k 11 --k 13 --k 15 --k 25 --k 27 --kernels w8a8
measure batch bench batch --policy fly
measure drafts bench drafts
measure drafts-torch bench drafts --kernels torch --repeats 0
measure policy bench policy --policy fly
measure demo demo
export OMP_NUM_THREADS=1
measure promise bench drafts --draft "adaptive(ngram)" --draft "adaptive(fly-draft)" --repeats 6
