// SPDX-License-Identifier: Apache-2.0

// A libmf_smem.so that needs another library.

int mf_hybm_core_is_here(void);

int smem_needs_it(void) { return mf_hybm_core_is_here(); }
