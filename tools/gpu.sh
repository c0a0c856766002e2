#!/usr/bin/env bash
# gpu.sh test|bench [ARGUMENT...]: what `make test-gpu` and `make bench-gpu` run, where there is a GPU.
#
# GPU_PYTHON is an interpreter with cuda-core, NVRTC, numpy, cffi, pytest and pytest-timeout; .venv's unless given. The package is
# that of the wheel in dist/, where there is one and GPU_PYTHON is given, else what the interpreter has installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${GPU_PYTHON:-$root/.venv/bin/python}
[[ $python != */* ]] || python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
what=$1
shift
mkdir -p "$root/build/run"

wheels=("$root"/dist/*.whl)
if [[ -n ${GPU_PYTHON:-} && -f ${wheels[0]} ]]; then
  site=$root/build/gpu/site-packages
  rm -rf "$site" && mkdir -p "$site"
  "$python" -m zipfile -e "${wheels[0]}" "$site"
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

cd "$root/build/run" # where `import transfer_engine` does not find the source folder
export PYTHONDONTWRITEBYTECODE=1
case $what in
  test)
    exec "$python" -m pytest -c "$root/tests/gpu/pytest.ini" --rootdir "$root" --confcutdir "$root" -p no:cacheprovider \
      -q --gpu-record "$@" "$root/tests/gpu" \
      "$root/tests/docs/test_examples.py::test_the_python_of_a_document_runs_on_a_gpu"
    ;;
  bench) exec "$python" "$root/tools/bench/gpu.py" "$@" ;;
  *)
    echo "usage: tools/gpu.sh test|bench [ARGUMENT...]" >&2
    exit 2
    ;;
esac
