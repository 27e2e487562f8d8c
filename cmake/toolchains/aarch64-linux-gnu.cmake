# SPDX-License-Identifier: Apache-2.0
# Cross-compiles with the GNU compilers of Debian's g++-aarch64-linux-gnu:
# cmake -DCMAKE_TOOLCHAIN_FILE=<this file> …

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
