/* SPDX-License-Identifier: Apache-2.0 */

#include "null_smem.h"

#include <string.h>

enum { kOk = 0, kConfigBytes = 1944 };

null_smem_calls_t null_smem_calls;

_Static_assert(sizeof(smem_trans_batch_params_t) == 56,
               "not the parameter block of src/abi.rs");

static int instance;

int32_t smem_trans_init(uint32_t device_id, uint32_t flags) {
    (void)device_id;
    (void)flags;
    return kOk;
}

void smem_trans_uninit(uint32_t flags) { (void)flags; }

int32_t smem_trans_config_init(void *config) {
    memset(config, 0, kConfigBytes);
    return kOk;
}

smem_trans_t smem_trans_create(const void *config, uint32_t flags) {
    (void)config;
    (void)flags;
    return &instance;
}

void smem_trans_destroy(smem_trans_t handle, uint32_t flags) {
    (void)handle;
    (void)flags;
}

int32_t smem_trans_get_rpc_port(smem_trans_t handle, uint16_t *port) {
    (void)handle;
    *port = 9;
    return kOk;
}

int32_t smem_trans_register_mem(smem_trans_t handle, void *address,
                                size_t capacity, uint32_t flags) {
    (void)handle;
    (void)address;
    (void)capacity;
    (void)flags;
    return kOk;
}

int32_t smem_trans_batch_register_mem(smem_trans_t handle, void *addresses[],
                                      size_t capacities[], uint32_t count,
                                      uint32_t flags) {
    (void)handle;
    (void)addresses;
    (void)capacities;
    (void)count;
    (void)flags;
    return kOk;
}

int32_t smem_trans_deregister_mem(smem_trans_t handle, void *address) {
    (void)handle;
    (void)address;
    return kOk;
}

int32_t smem_trans_batch_copy(smem_trans_t handle,
                              smem_trans_batch_params_t *params,
                              uint64_t *batch_id) {
    (void)handle;
    null_smem_calls.pieces += params->batchSize;
    *batch_id = null_smem_calls.copies++;
    return kOk;
}

int32_t smem_trans_batch_status_query(smem_trans_t handle, uint64_t batch_id,
                                      int32_t *result, uint32_t flags) {
    (void)handle;
    (void)batch_id;
    (void)flags;
    null_smem_calls.queries++;
    *result = kOk;
    return kOk;
}

int32_t smem_trans_set_peer_down_callback(
    smem_trans_t handle, void (*callback)(const char *, void *), void *user) {
    (void)handle;
    (void)callback;
    (void)user;
    return kOk;
}

int32_t smem_set_log_level(int level) {
    (void)level;
    return kOk;
}
