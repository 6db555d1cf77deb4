#!/usr/bin/env bash
# Install what is missing: `bash dev/setup.sh` everything, `bash dev/setup.sh --needed` only what a trainer needs, which is
# a C compiler, `bash dev/setup.sh --tests` also what make test needs. Prints the one line that does it, and runs it where it
# may (as root, with apt-get).
set -u
needed=() tests=() optional=()
command -v "${CC:-gcc}" >/dev/null || needed+=(gcc libc6-dev)
python3 -c 'import venv, ensurepip' 2>/dev/null || tests+=(python3 python3-venv)  # dev/data/prepare_gpt2.py
[ "${MPI:-1}" = 0 ] || command -v mpicc >/dev/null || tests+=(libopenmpi-dev openmpi-bin)  # several ranks
command -v clang-format >/dev/null || optional+=(clang-format)                    # formatting in make check
command -v g++ >/dev/null || optional+=(g++)                                      # headers as C++ in make check
case ${1:-} in
    --needed) missing=("${needed[@]}") optional+=("${tests[@]}") ;;
    --tests) missing=("${needed[@]}" "${tests[@]}") ;;
    *) missing=("${needed[@]}" "${tests[@]}" "${optional[@]}") ;;
esac
if [ ${#missing[@]} -eq 0 ]; then
    [ ${#optional[@]} -eq 0 ] || echo "optional parts that make setup would add: ${optional[*]}"
    exit 0
fi
line="apt-get install -y --no-install-recommends ${missing[*]}"
echo "$line"
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive $line >/dev/null && exit 0
    echo "that did not work here" >&2
else
    echo "run that line as root, or install the equivalent packages of your system" >&2
fi
[ ${#needed[@]} -eq 0 ]
