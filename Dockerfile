# What README's commands need, on Debian 12. To run the project's check in it:
#
#   docker build --tag hoistway-check .
#   docker run --rm --privileged --volume "$PWD:/hoistway" hoistway-check
#
# The tests mount file systems and limit the memory of control groups, which a container may do only with --privileged.
# Without it, the tests that need this are skipped, each with its reason.
FROM rust:1.95-bookworm

# The compiler of C and git are in the image. The file system of the tests needs /dev/fuse, and mounts as root.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && rustup component add clippy rustfmt \
    && git config --system --add safe.directory /hoistway

WORKDIR /hoistway
CMD ["bash", ".ci/run"]
