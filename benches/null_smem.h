/* SPDX-License-Identifier: Apache-2.0 */

/* What libmf_smem.so is to the benchmark: a library that costs nothing. It
 * accepts every batch at once, answers the first query about it with success,
 * copies nothing and counts its calls. Signatures as in src/abi.rs. */

#ifndef MEMFABRIC_BENCHES_NULL_SMEM_H
#define MEMFABRIC_BENCHES_NULL_SMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void *smem_trans_t;

typedef struct {
    const char *destUrl;
    void **srcList;
    void **destList;
    size_t *sizeList;
    uint32_t batchSize;
    uint32_t opcode;
    void *stream;
    uint32_t flags;
} smem_trans_batch_params_t;

int32_t smem_trans_batch_copy(smem_trans_t handle,
                              smem_trans_batch_params_t *params,
                              uint64_t *batch_id);
int32_t smem_trans_batch_status_query(smem_trans_t handle, uint64_t batch_id,
                                      int32_t *result, uint32_t flags);

/* Calls since the process began. Not atomic, because an atomic addition would
 * cost more than the rest of a call: the caller makes one call at a time, as
 * the transport does. */
typedef struct {
    uint64_t copies;
    uint64_t pieces;
    uint64_t queries;
} null_smem_calls_t;

extern null_smem_calls_t null_smem_calls;

#ifdef __cplusplus
}
#endif

#endif /* MEMFABRIC_BENCHES_NULL_SMEM_H */
