#!/usr/bin/env bash
# Builds turbogr's AscendC ops into one package of custom ops (vendor turbogr), and installs it where asked to.
# See docs/ascend.md. Functionally emulated, not run on an NPU.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
readonly here
readonly known_socs="ascend910b ascend910_93"

usage() {
  cat <<'TEXT'
usage: bash build.sh [options]
  --soc LIST           compute units, separated by commas: ascend910b, ascend910_93 (default: both)
  --ops LIST           ops to build, separated by commas (default: all)
  --jobs N             parallel jobs (default: number of processors)
  --build-dir DIR      where to build (default: build, beside this script)
  --install            install the package into CANN's opp folder
  --install-path DIR   install it into DIR instead; prints what to source afterwards
  --clean              remove the build folder first
  --help               show this

CANN 9 or newer must be installed and its set_env.sh sourced. The package is BUILD_DIR/custom_opp_*.run.
TEXT
}

fail() {
  printf 'build.sh: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

value_of() {
  [[ $# -ge 2 && -n "$2" && "$2" != --* ]] || fail "$1 needs a value" "bash build.sh --help lists the options"
  printf '%s' "$2"
}

# --- options -----------------------------------------------------------------------------------------

socs="${known_socs// /,}"
ops=""
jobs="$(nproc 2>/dev/null || echo 1)"
build="$here/build"
install=no
install_path=""
clean=no

while [[ $# -gt 0 ]]; do
  case "$1" in
    --soc) socs="$(value_of "$@")"; shift ;;
    --ops) ops="$(value_of "$@")"; shift ;;
    --jobs) jobs="$(value_of "$@")"; shift ;;
    --build-dir) build="$(value_of "$@")"; shift ;;
    --install) install=yes ;;
    --install-path) install_path="$(value_of "$@")"; install=yes; shift ;;
    --clean) clean=yes ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) fail "unknown option $1" "bash build.sh --help lists the options" ;;
  esac
  shift
done

[[ "$jobs" =~ ^[1-9][0-9]*$ ]] || fail "--jobs takes a number, not '$jobs'"
for soc in ${socs//,/ }; do
  [[ " $known_socs " == *" $soc "* ]] ||
    fail "--soc takes ${known_socs// / or }, not '$soc'" \
      "ascend910b: Atlas A2 (910B1 to 910B4). ascend910_93: Atlas A3 (910C)." \
      "The kernels are written for these; Ascend 950 and older chips need other ones."
done
for op in ${ops//,/ }; do
  [[ -f "$here/$op/op_host/${op}_def.cpp" ]] ||
    fail "--ops: there is no op '$op'" "ops are the folders with an op_host in $here"
done
[[ "$build" == /* ]] || build="$PWD/$build"
if [[ "$clean" == yes && -e "$build" ]]; then
  [[ -f "$build/CMakeCache.txt" ]] || fail "--clean removes build folders, and $build is none"
fi

# --- what the machine must have ----------------------------------------------------------------------

cann="${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}"
if [[ -z "$cann" ]]; then
  for place in "$HOME/Ascend" /usr/local/Ascend; do
    for name in cann ascend-toolkit; do
      for script in "$place/$name/set_env.sh" "$place/$name/latest/set_env.sh"; do
        [[ -f "$script" ]] && fail "CANN is installed but not active" "source $script" "then run this again"
      done
    done
  done
  fail "CANN was not found: ASCEND_HOME_PATH is not set" \
    "install CANN 9 or newer (toolkit, and the kernels of your chip): https://www.hiascend.com/cann" \
    "then: source /usr/local/Ascend/cann/set_env.sh (or the set_env.sh where you installed it)"
fi
[[ -d "$cann" ]] || fail "ASCEND_HOME_PATH is $cann, and there is no such folder" "source the set_env.sh of your CANN"
[[ -d "$cann/compiler/tikcpp/ascendc_kernel_cmake/fwk_modules" ]] ||
  fail "CANN at $cann has no CMake functions for packages of ops (compiler/tikcpp/ascendc_kernel_cmake/fwk_modules)" \
    "CANN 9 or newer is needed, with the toolkit and not the runtime alone" \
    "older ones build from a project that msopgen generates from the <op>.json files; this script does not do that"
[[ -x "$cann/tools/opbuild/op_build" ]] ||
  fail "CANN at $cann has no tools/opbuild/op_build" "install the toolkit package of CANN, not the runtime alone"
for tool in cmake make g++ python3; do
  command -v "$tool" >/dev/null || fail "$tool was not found" "install it, for instance: apt install $tool"
done
version="$(cmake --version | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')"
[[ "$(printf '3.19\n%s\n' "$version" | sort -V | head -n 1)" == 3.19 ]] ||
  fail "cmake is $version, and 3.19 or newer is needed" "pip install cmake"
export ASCEND_HOME_PATH="$cann"

# --- build -------------------------------------------------------------------------------------------

if [[ "$clean" == yes ]]; then rm -rf -- "$build"; fi
printf 'CANN:    %s\nunits:   %s\nops:     %s\nfolder:  %s\n' "$cann" "$socs" "${ops:-all}" "$build"
cmake -S "$here" -B "$build" --preset default \
  -DASCEND_COMPUTE_UNIT="${socs//,/;}" -DTURBOGR_OPS="${ops//,/;}" -DCMAKE_INSTALL_PREFIX="$build" ||
  fail "configuration failed" \
    "op definitions are compiled at this step: their messages are above" \
    "after a change of CANN start afresh: bash build.sh --clean"
# Kernels first: packing would build them anew, one by one.
cmake --build "$build" --target binary -j "$jobs" ||
  fail "a kernel does not compile" "its messages are above; to see one op alone: bash build.sh --ops NAME --jobs 1"
cmake --build "$build" --target package -j "$jobs" || fail "the package could not be made" "its messages are above"

shopt -s nullglob
packages=("$build"/custom_opp_*.run)
[[ ${#packages[@]} -eq 1 ]] || fail "expected one custom_opp_*.run in $build, found ${#packages[@]}" \
  "start afresh: bash build.sh --clean"
package="${packages[0]}"
printf 'package: %s\n' "$package"

# --- install -----------------------------------------------------------------------------------------

if [[ "$install" == no ]]; then
  printf 'next:    bash %s --install, or run the package yourself\n' "${BASH_SOURCE[0]}"
  exit 0
fi
if [[ -n "$install_path" ]]; then
  mkdir -p -- "$install_path"
  install_path="$(cd "$install_path" && pwd)"
  bash "$package" --install-path="$install_path" || fail "the package did not install into $install_path"
  printf 'next:    source %s/vendors/turbogr/bin/set_env.bash\n' "$install_path"
else
  bash "$package" || fail "the package did not install into ${ASCEND_OPP_PATH:-CANN\'s opp folder}" \
    "without the right to write there: bash build.sh --install-path DIR"
fi
printf 'then:    python %s/torch/setup.py build_ext   (the adapter for torch)\n' "$here"
