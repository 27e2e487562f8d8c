// SPDX-License-Identifier: Apache-2.0
//! The emulated `libascendcl.so` as a host opens it.
#![allow(unsafe_code)] // calls the library's functions

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Deref;
use std::process::Command;
use std::ptr;

use ascendcl::{
    ACL_ERROR_INVALID_PARAM, ACL_ERROR_RT_CONTEXT_NULL, ACL_ERROR_RT_PARAM_INVALID,
    ACL_MEM_LOCATION_TYPE_DEVICE, ACL_MEM_LOCATION_TYPE_UNREGISTERED, ACL_SUCCESS, PtrAttributes,
};
use libloading::Library;
use parking_lot::{Mutex, MutexGuard};

const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const DEVICE_TO_DEVICE: c_int = 3;
const DEFAULT: c_int = 4;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) $(-> $answer)?),* }
        impl Functions {
            fn load(library: &'static Library) -> Self {
                Self { $($name: {
                    // SAFETY: the signature is the export's.
                    let symbol = unsafe { library.get(stringify!($name).as_bytes()) };
                    *symbol.expect(stringify!($name))
                }),* }
            }
        }
    };
}

/// The library, for one test at a time: addresses that one frees could be
/// another's at once.
struct Acl {
    functions: Functions,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for Acl {
    type Target = Functions;
    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Acl {
    fn open() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock();
        let exe = std::env::current_exe().expect("a path of this program");
        // SAFETY: the emulator runs no code when it is opened.
        let library = unsafe { Library::new(exe.with_file_name("libascendcl.so")) };
        let library = Box::leak(Box::new(library.expect("the emulator opens")));
        let acl = Self {
            functions: Functions::load(library),
            _alone: alone,
        };
        // What an earlier test has set on this thread.
        // SAFETY: a plain number.
        unsafe { (acl.mf_emu_set_device_code)(0) };
        acl
    }
}

functions! {
    aclrtSetDevice: fn(i32) -> c_int;
    aclrtGetDevice: fn(*mut i32) -> c_int;
    aclrtMalloc: fn(*mut *mut c_void, usize, c_int) -> c_int;
    aclrtFree: fn(*mut c_void) -> c_int;
    aclrtPointerGetAttributes: fn(*const c_void, *mut PtrAttributes) -> c_int;
    aclrtMemcpy: fn(*mut c_void, usize, *const c_void, usize, c_int) -> c_int;
    mf_emu_set_device: fn(i32);
    mf_emu_set_device_code: fn(c_int);
    mf_emu_acl_fail: fn(*const c_char, c_int);
    mf_emu_acl_count: fn(*const c_char) -> u64;
    mf_emu_set_host_location: fn(u32);
    mf_emu_alloc_device_memory: fn(usize, i32) -> *mut c_void;
    mf_emu_alloc_guarded_memory: fn(usize, i32) -> *mut c_void;
    mf_emu_free_device_memory: fn(*mut c_void);
    mf_emu_device_alias: fn(*const c_void) -> *mut c_void;
}

impl Functions {
    fn device(&self) -> Result<i32, c_int> {
        let mut device = -7;
        // SAFETY: `device` is live.
        match unsafe { (self.aclrtGetDevice)(&mut device) } {
            ACL_SUCCESS => Ok(device),
            code => Err(code),
        }
    }

    fn set_device(&self, device: i32) {
        // SAFETY: a plain number.
        unsafe { (self.mf_emu_set_device)(device) }
    }

    fn guarded(&self, size: usize, device: i32) -> *mut c_void {
        // SAFETY: plain numbers.
        let pointer = unsafe { (self.mf_emu_alloc_guarded_memory)(size, device) };
        assert!(!pointer.is_null());
        pointer
    }

    fn location(&self, pointer: *const c_void) -> (u32, u32) {
        let mut attributes = PtrAttributes::default();
        // SAFETY: `attributes` is live.
        let code = unsafe { (self.aclrtPointerGetAttributes)(pointer, &mut attributes) };
        assert_eq!(code, ACL_SUCCESS);
        assert_eq!(attributes.reserved, [0; 4]);
        (attributes.location_type, attributes.location_id)
    }

    fn memcpy(&self, to: *mut c_void, from: *const c_void, count: usize, kind: c_int) -> c_int {
        // SAFETY: the tests pass memory of at least `count` bytes.
        unsafe { (self.aclrtMemcpy)(to, count, from, count, kind) }
    }
}

#[test]
fn a_thread_without_a_device_has_no_context() {
    let acl = Acl::open();
    assert_eq!(acl.device(), Err(ACL_ERROR_RT_CONTEXT_NULL));
    acl.set_device(5);
    assert_eq!(acl.device(), Ok(5));
    // SAFETY: a plain number.
    assert_eq!(unsafe { (acl.aclrtSetDevice)(6) }, ACL_SUCCESS);
    assert_eq!(acl.device(), Ok(6));
    std::thread::scope(|scope| {
        let acl = &acl.functions;
        let elsewhere = scope.spawn(|| acl.device());
        assert_eq!(
            elsewhere.join().expect("no panic"),
            Err(ACL_ERROR_RT_CONTEXT_NULL)
        );
    });
    // SAFETY: a plain number.
    unsafe { (acl.mf_emu_set_device_code)(507_033) };
    assert_eq!(acl.device(), Err(507_033));
    acl.set_device(-1);
    assert_eq!(acl.device(), Err(ACL_ERROR_RT_CONTEXT_NULL));
    // SAFETY: NULL is what is tried.
    let code = unsafe { (acl.aclrtGetDevice)(ptr::null_mut()) };
    assert_eq!(code, ACL_ERROR_INVALID_PARAM);
}

#[test]
fn device_memory_is_known_by_every_address_inside_and_by_none_outside() {
    let acl = Acl::open();
    let pointer = acl.guarded(5000, 3);
    let device = (ACL_MEM_LOCATION_TYPE_DEVICE, 3);
    assert_eq!(acl.location(pointer), device);
    assert_eq!(acl.location(pointer.wrapping_byte_add(4999)), device);
    assert_ne!(acl.location(pointer.wrapping_byte_add(5000)), device);
    assert_ne!(acl.location(pointer.wrapping_byte_sub(1)), device);
    let local = 7;
    let host = (ACL_MEM_LOCATION_TYPE_UNREGISTERED, 0);
    assert_eq!(acl.location(ptr::from_ref(&local).cast()), host);
    // SAFETY: allocated above.
    unsafe { (acl.mf_emu_free_device_memory)(pointer) };
    assert_eq!(acl.location(pointer), host, "freed");
}

#[test]
fn memcpy_reaches_memory_that_the_cpu_cannot_touch() {
    let acl = Acl::open();
    acl.set_device(0);
    let (first, second) = (acl.guarded(100, 0), acl.guarded(100, 1));
    let from = *b"seventeen letters";
    let mut to = [0_u8; 17];
    let inside = first.wrapping_byte_add(83);
    assert_eq!(
        acl.memcpy(inside, from.as_ptr().cast(), 17, HOST_TO_DEVICE),
        ACL_SUCCESS
    );
    assert_eq!(
        acl.memcpy(second, inside, 17, DEVICE_TO_DEVICE),
        ACL_SUCCESS
    );
    assert_eq!(
        acl.memcpy(to.as_mut_ptr().cast(), second, 17, DEVICE_TO_HOST),
        ACL_SUCCESS
    );
    assert_eq!(to, from);
    // SAFETY: an allocation of this library.
    let alias = unsafe { (acl.mf_emu_device_alias)(second) };
    // SAFETY: 17 bytes of the allocation, for the CPU.
    let seen = unsafe { std::slice::from_raw_parts(alias.cast::<u8>(), 17) };
    assert_eq!(seen, from);
    assert_eq!(acl.memcpy(second, first, 17, DEFAULT), ACL_SUCCESS);
}

#[test]
fn memcpy_refuses_what_does_not_fit() {
    let acl = Acl::open();
    acl.set_device(0);
    let device = acl.guarded(100, 0);
    let mut host = [0_u8; 200];
    let host: *mut c_void = host.as_mut_ptr().cast();
    let bad = ACL_ERROR_RT_PARAM_INVALID;
    assert_eq!(
        acl.memcpy(host, device, 8, HOST_TO_DEVICE),
        bad,
        "the kind is the other way"
    );
    assert_eq!(
        acl.memcpy(device, host, 101, HOST_TO_DEVICE),
        bad,
        "past the allocation"
    );
    assert_eq!(
        acl.memcpy(device, host, 0, HOST_TO_DEVICE),
        bad,
        "nothing to copy"
    );
    assert_eq!(
        acl.memcpy(device, host, 8, 9),
        ACL_ERROR_INVALID_PARAM,
        "no such kind"
    );
    assert_eq!(
        acl.memcpy(ptr::null_mut(), host, 8, DEFAULT),
        ACL_ERROR_INVALID_PARAM
    );
    // SAFETY: nothing is copied.
    let small = unsafe { (acl.aclrtMemcpy)(device, 7, host, 8, HOST_TO_DEVICE) };
    assert_eq!(small, bad, "more than destMax");
    std::thread::scope(|scope| {
        let (memcpy, host, device) = (acl.aclrtMemcpy, host.addr(), device.addr());
        let elsewhere = scope.spawn(move || {
            let pointer = ptr::without_provenance_mut;
            // SAFETY: nothing is copied.
            unsafe { memcpy(pointer(device), 8, pointer(host), 8, HOST_TO_DEVICE) }
        });
        let code = elsewhere.join().expect("no panic");
        assert_eq!(code, ACL_ERROR_RT_CONTEXT_NULL, "a thread without a device");
    });
}

#[test]
fn malloc_gives_guarded_memory_of_the_current_device_and_free_takes_it_once() {
    let acl = Acl::open();
    let mut pointer = ptr::null_mut();
    // SAFETY: `pointer` is live.
    let mut malloc = |size| unsafe { (acl.aclrtMalloc)(&mut pointer, size, 0) };
    assert_eq!(malloc(64), ACL_ERROR_RT_CONTEXT_NULL);
    acl.set_device(2);
    assert_eq!(malloc(0), ACL_ERROR_INVALID_PARAM);
    assert_eq!(malloc(64), ACL_SUCCESS);
    assert_eq!(acl.location(pointer), (ACL_MEM_LOCATION_TYPE_DEVICE, 2));
    // SAFETY: allocated above, then not any more.
    let free = |pointer| unsafe { (acl.aclrtFree)(pointer) };
    assert_eq!(
        free(pointer.wrapping_byte_add(1)),
        ACL_ERROR_RT_PARAM_INVALID
    );
    assert_eq!(free(pointer), ACL_SUCCESS);
    assert_eq!(free(pointer), ACL_ERROR_RT_PARAM_INVALID);
    assert_eq!(free(ptr::null_mut()), ACL_ERROR_INVALID_PARAM);
}

#[test]
fn memory_that_is_not_guarded_can_be_touched_and_counts_as_the_devices() {
    let acl = Acl::open();
    // SAFETY: plain numbers.
    let pointer = unsafe { (acl.mf_emu_alloc_device_memory)(64, 1) };
    // SAFETY: 64 bytes that the CPU can touch.
    unsafe { pointer.cast::<u8>().write(0x5a) };
    // SAFETY: an allocation of this library.
    let alias = unsafe { (acl.mf_emu_device_alias)(pointer) };
    // SAFETY: the same byte.
    assert_eq!(unsafe { alias.cast::<u8>().read() }, 0x5a);
    assert_eq!(acl.location(pointer), (ACL_MEM_LOCATION_TYPE_DEVICE, 1));
}

/// A role for the next tests: settings of a whole process.
#[test]
#[ignore = "a role for the other tests, not a test"]
fn other_process() {
    let acl = Acl::open();
    match std::env::var("ROLE").as_deref() {
        Ok("touch") => {
            let pointer = acl.guarded(64, 0);
            // SAFETY: none: this must end the process.
            unsafe { pointer.cast::<u8>().write_volatile(1) };
        }
        Ok("fail") => {
            let name = c"aclrtPointerGetAttributes";
            // SAFETY: a terminated string.
            unsafe { (acl.mf_emu_acl_fail)(name.as_ptr(), 507_899) };
            let mut attributes = PtrAttributes::default();
            let pointer = acl.guarded(64, 0);
            // SAFETY: `attributes` is live.
            let code = unsafe { (acl.aclrtPointerGetAttributes)(pointer, &mut attributes) };
            assert_eq!((code, attributes), (507_899, PtrAttributes::default()));
            // SAFETY: terminated strings.
            let count = |name: &CStr| unsafe { (acl.mf_emu_acl_count)(name.as_ptr()) };
            assert_eq!(count(name), 1);
            assert_eq!(count(c"aclrtGetDevice"), 0);
            assert_eq!(count(c"aclrtNothing"), u64::MAX);
            // SAFETY: a terminated string.
            unsafe { (acl.mf_emu_acl_fail)(name.as_ptr(), 0) };
            // SAFETY: a plain number.
            unsafe { (acl.mf_emu_set_host_location)(0) };
            assert_eq!(acl.location(ptr::from_ref(&count).cast()).0, 0);
        }
        Ok("device") => {
            assert_eq!(acl.device(), Ok(11));
            acl.set_device(-1);
            assert_eq!(acl.device(), Err(ACL_ERROR_RT_CONTEXT_NULL));
        }
        other => panic!("no role {other:?}"),
    }
}

fn other_process_as(role: &str) -> std::process::Output {
    Command::new(std::env::current_exe().expect("a path of this program"))
        .args(["other_process", "--exact", "--ignored", "--test-threads=1"])
        .env("ROLE", role)
        .env("MF_EMULATOR_DEVICE", "11")
        .output()
        .expect("the test program runs")
}

#[test]
fn touching_guarded_memory_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(
        other_process_as("touch").status.signal(),
        Some(libc::SIGSEGV)
    );
}

#[test]
fn functions_fail_when_told_and_are_counted() {
    let output = other_process_as("fail");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

#[test]
fn the_environment_gives_a_device_to_threads_that_set_nothing() {
    let output = other_process_as("device");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}
