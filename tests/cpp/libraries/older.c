// SPDX-License-Identifier: Apache-2.0

// What a published revision of libmf_smem.so exports: three of the transport's
// symbols are not there. Any call of the others is a fault of the caller.

#include <stdint.h>
#include <stdio.h>

#define FUNCTION(name)                                                 \
    int32_t name(void) {                                               \
        fputs("function of the older library was called: " #name "\n", \
              stderr);                                                 \
        return -1;                                                     \
    }

FUNCTION(smem_trans_init)
FUNCTION(smem_trans_uninit)
FUNCTION(smem_trans_config_init)
FUNCTION(smem_trans_create)
FUNCTION(smem_trans_destroy)
FUNCTION(smem_trans_register_mem)
FUNCTION(smem_trans_batch_register_mem)
FUNCTION(smem_trans_deregister_mem)
FUNCTION(smem_trans_set_peer_down_callback)
FUNCTION(smem_set_log_level)

uint32_t smem_get_abi_version(void) { return 0x00010003; }
