// SPDX-License-Identifier: Apache-2.0

// Nothing but the shim's declaration, against an engine whose Transport has
// another quiesce() or warmupSegment().

#include "tent/transport/memfabric/memfabric_transport.h"
