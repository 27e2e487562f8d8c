// SPDX-License-Identifier: Apache-2.0
//! An emulated `libascendcl.so`: the few functions of CANN that the transport
//! asks for, on a machine with no NPU.
//!
//! ```c
//! // CANN's, with its signatures and codes.
//! int aclrtSetDevice(int32_t device);
//! int aclrtGetDevice(int32_t *device);                 // 107002 on a thread without one
//! int aclrtMalloc(void **pointer, size_t size, int policy);
//! int aclrtFree(void *pointer);
//! int aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes);
//! int aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, int kind);
//!
//! // The emulator's own.
//! void     mf_emu_set_device(int32_t device);          // of this thread; negative: none
//! void     mf_emu_set_device_code(int code);           // what aclrtGetDevice answers on this thread
//! void     mf_emu_acl_fail(const char *name, int code);// what a function answers from now on; 0: nothing special
//! uint64_t mf_emu_acl_count(const char *name);         // calls of a function; UINT64_MAX: no such function
//! void     mf_emu_set_host_location(uint32_t type);    // how host memory is reported, see below
//! void    *mf_emu_alloc_device_memory(size_t size, int32_t device);   // the CPU can touch it
//! void    *mf_emu_alloc_guarded_memory(size_t size, int32_t device);  // touching it is SIGSEGV
//! void     mf_emu_free_device_memory(void *pointer);
//! void    *mf_emu_device_alias(const void *pointer);   // where the CPU can touch the same bytes; NULL: no device memory
//! ```
//!
//! **Device.** A thread that has set nothing has the one that the environment
//! variable `MF_EMULATOR_DEVICE` names: a device id, or `code:<n>` for what
//! `aclrtGetDevice` answers. Without it, there is none.
//!
//! **Memory.** `aclrtMalloc` gives guarded memory: the pointer is good for
//! `aclrtMemcpy`, for registration with the emulated `libmf_smem.so` and for
//! nothing else, as on an NPU. Two mappings of one memfd named
//! `mf-emulator-device` make that work. `aclrtPointerGetAttributes` knows every
//! address inside. Other memory is "unregistered" (2), as CANN 9.1 has been
//! observed to answer for stack and heap; older ones may say "host" (0).
//!
//! Facts about CANN: signatures, the layout of `aclrtPtrAttributes` and the
//! numbers are those of its published headers and documentation.

mod device;
pub mod exports;
mod memory;

/// Success.
pub const ACL_SUCCESS: i32 = 0;
/// A null pointer, or a zero size, in an argument.
pub const ACL_ERROR_INVALID_PARAM: i32 = 100_000;
/// An argument that the runtime does not take.
pub const ACL_ERROR_RT_PARAM_INVALID: i32 = 107_000;
/// An impossible device id.
pub const ACL_ERROR_RT_INVALID_DEVICEID: i32 = 107_001;
/// The calling thread has no current device.
pub const ACL_ERROR_RT_CONTEXT_NULL: i32 = 107_002;
/// No memory.
pub const ACL_ERROR_RT_MEMORY_ALLOCATION: i32 = 207_001;

/// `aclrtMemLocationType`: allocated with `aclrtMallocHost`.
pub const ACL_MEM_LOCATION_TYPE_HOST: u32 = 0;
/// `aclrtMemLocationType`: allocated with `aclrtMalloc`.
pub const ACL_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
/// `aclrtMemLocationType`: not allocated through CANN.
pub const ACL_MEM_LOCATION_TYPE_UNREGISTERED: u32 = 2;

/// `aclrtPtrAttributes`, with `aclrtMemLocation` spelt out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PtrAttributes {
    /// `location.id`, the device; of no meaning for host memory.
    pub location_id: u32,
    /// `location.type`.
    pub location_type: u32,
    /// `pageSize`, bytes.
    pub page_size: u32,
    /// `rsv`, 0.
    pub reserved: [u32; 4],
}

const _: () = {
    assert!(size_of::<PtrAttributes>() == 28 && align_of::<PtrAttributes>() == 4);
    assert!(std::mem::offset_of!(PtrAttributes, location_id) == 0);
    assert!(std::mem::offset_of!(PtrAttributes, location_type) == 4);
    assert!(std::mem::offset_of!(PtrAttributes, page_size) == 8);
    assert!(std::mem::offset_of!(PtrAttributes, reserved) == 12);
};
