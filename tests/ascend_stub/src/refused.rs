// SPDX-License-Identifier: Apache-2.0
//! The functions that are looked up and, over TCP, never called.
#![allow(unsafe_code)] // exported symbols
#![allow(non_snake_case)] // as the vendor names them

use std::ffi::c_int;

/// Fails, and says which function it was: a path that calls one needs more than
/// this stand-in.
fn refuse(name: &str) -> c_int {
    eprintln!("ascend_stub: {name} was called, which has no stand-in");
    -1
}

macro_rules! refused {
    ($($name:ident,)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            refuse(stringify!($name))
        }
    )*};
}

refused! {
    // libascendcl.so
    aclrtBinaryGetFunction,
    aclrtBinaryLoadFromFile,
    aclrtCreateNotify,
    aclrtCreateStream,
    aclrtCreateStreamWithConfig,
    aclrtDestroyNotify,
    aclrtDestroyStream,
    aclrtDeviceEnablePeerAccess,
    aclrtFreeHost,
    aclrtGetCurrentContext,
    aclrtGetNotifyId,
    aclrtGetVersion,
    aclrtKernelArgsAppend,
    aclrtKernelArgsFinalize,
    aclrtKernelArgsInit,
    aclrtLaunchKernelWithConfig,
    aclrtMallocHost,
    aclrtMemcpy2d,
    aclrtMemcpy2dAsync,
    aclrtMemcpyAsync,
    aclrtMemcpyBatch,
    aclrtMemset,
    aclrtSetStreamAttribute,
    aclrtStreamAbort,
    aclrtStreamGetId,
    aclrtSynchronizeStream,
    aclrtWaitAndResetNotify,
    aclsysGetVersionStr,
    rtDisableP2P,
    rtEnableP2P,
    rtGetP2PStatus,
    rtIpcCloseMemory,
    rtIpcDestroyMemoryName,
    rtIpcOpenMemory,
    rtIpcSetMemoryName,
    rtMemcpyAsyncWithoutCheckKind,
    rtSetIpcMemorySuperPodPid,
    // libascend_hal.so
    drvNotifyIdAddrOffset,
    halCqReportRecv,
    halHostRegister,
    halHostUnregisterEx,
    halMemAddressFree,
    halMemAddressReserve,
    halMemAlloc,
    halMemCreate,
    halMemExportToShareableHandleV2,
    halMemFree,
    halMemGetAllocationGranularity,
    halMemImportFromShareableHandleV2,
    halMemMap,
    halMemRelease,
    halMemRetainAllocationHandle,
    halMemSetAccess,
    halMemShareHandleSetAttribute,
    halMemTransShareableHandle,
    halMemUnmap,
    halResourceConfig,
    halResourceDetailQuery,
    halResourceIdAlloc,
    halResourceIdFree,
    halSqCqAllocate,
    halSqCqFree,
    halSqCqQuery,
    halSqTaskSend,
    // libra.so
    ra_ai_qp_create,
    ra_deregister_mr,
    ra_get_ifaddrs,
    ra_get_ifnum,
    ra_get_notify_base_addr,
    ra_get_notify_mr_info,
    ra_get_qp_status,
    ra_get_sockets,
    ra_init,
    ra_qp_connect_async,
    ra_qp_create,
    ra_qp_create_with_attrs,
    ra_qp_destroy,
    ra_rdev_get_handle,
    ra_rdev_init_v2,
    ra_register_mr,
    ra_send_wr,
    ra_send_wr_v2,
    ra_set_qp_attr_qos,
    ra_socket_batch_close,
    ra_socket_batch_connect,
    ra_socket_deinit,
    ra_socket_init,
    ra_socket_listen_start,
    ra_socket_listen_stop,
    ra_socket_white_list_add,
    ra_socket_white_list_del,
    // libhccl.so, libtsdclient.so
    HcclCommDestroy,
    HcclCommInitClusterInfoMemConfig,
    TsdOpen,
}
