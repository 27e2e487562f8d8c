// SPDX-License-Identifier: Apache-2.0

// Calls the core, and fails unless it answers as it must.

#include <cstdio>
#include <string>

#include "library.h"

int main() {
    const std::string answer = installWithoutSettings();
    std::puts(answer.c_str());
    return answer.find("MF_PROTOCOL must be set") == std::string::npos;
}
