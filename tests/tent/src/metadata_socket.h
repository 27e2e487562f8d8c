// SPDX-License-Identifier: Apache-2.0

// How a description travels from one process to another: connect, read to the
// end. Loopback only.

#ifndef TENT_DOUBLE_METADATA_SOCKET_H
#define TENT_DOUBLE_METADATA_SOCKET_H

#include <string>

#include "tent/common/status.h"

namespace tent_double {

// Asks the control service at `address` (`ip:port`, `[ip]:port`).
mooncake::tent::Status ask(const std::string& address, std::string& text);

}  // namespace tent_double

#endif  // TENT_DOUBLE_METADATA_SOCKET_H
