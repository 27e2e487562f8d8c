// SPDX-License-Identifier: Apache-2.0

#ifndef MEMFABRIC_TESTS_CONSUMER_LIBRARY_H
#define MEMFABRIC_TESTS_CONSUMER_LIBRARY_H

#include <string>

// What the core answers to an install without settings.
std::string installWithoutSettings();

#endif  // MEMFABRIC_TESTS_CONSUMER_LIBRARY_H
