// SPDX-License-Identifier: Apache-2.0

// TENT brings a copy of this library; here it is the system's.

#include <nlohmann/json.hpp>
