// SPDX-License-Identifier: Apache-2.0

// The dependency that is missing where dependent.c is opened.

int mf_hybm_core_is_here(void) { return 1; }
