#!/bin/sh
# Grade strangers' notebooks in a container that nothing leaves but the reports:
#     docker build -t ddp-course . -f deploy/grading.Dockerfile
#     deploy/grading.sh SUBMISSIONS REPORTS [more options of `ddp-course grade`]
set -eu
submissions=$(realpath "$1") reports=$(realpath "$2")
shift 2
exec docker run --rm --network none --read-only --tmpfs /tmp:size=4g --shm-size 1g \
    --memory 12g --pids-limit 512 --cpus 2 --cap-drop ALL --security-opt no-new-privileges \
    --user "$(id -u):$(id -g)" -e HOME=/tmp \
    -v "$submissions:/submissions:ro" -v "$reports:/reports" \
    ddp-course ddp-course grade /submissions --json /reports/points.json --html /reports "$@"
