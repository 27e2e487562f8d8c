// SPDX-License-Identifier: Apache-2.0
//! Codes of the vendor library, with their names.

use std::fmt;

/// Every code that has a name, with the library's own spelling \[pub\].
pub const NAMES: [(i32, &str); 18] = [
    (0, "SM_OK"),
    (-1, "SM_ERROR"),
    (-2000, "SM_INVALID_PARAM"),
    (-2001, "SM_MALLOC_FAILED"),
    (-2002, "SM_NEW_OBJECT_FAILED"),
    (-2003, "SM_NOT_STARTED"),
    (-2004, "SM_TIMEOUT"),
    (-2005, "SM_REPEAT_CALL"),
    (-2006, "SM_DUPLICATED_OBJECT"),
    (-2007, "SM_OBJECT_NOT_EXISTS"),
    (-2008, "SM_NOT_INITIALIZED"),
    (-2009, "SM_RESOURCE_IN_USE"),
    (-2010, "SM_RECONNECT"),
    (-2011, "SM_GET_OBJIECT"),
    (-2012, "SM_PARTIAL_FAILED"),
    (-2013, "SM_INNER_BUSY"),
    (-2014, "SM_NOT_CONNECTED"),
    (-2015, "SMEM_BUFFER_TOO_SMALL"),
];

/// A code of the vendor library; prints as name and number.
///
/// Unknown codes keep their number instead of being flattened into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code(pub i32);

impl Code {
    /// Success \[pub\].
    pub const OK: Self = Self(0);
    /// Failed, for no reason that has a code of its own \[pub\].
    pub const ERROR: Self = Self(-1);
    /// A batch that is still running.
    ///
    /// The specification names it without a number and no published header has it;
    /// 1 is what the predecessor of this transport used. If it is wrong, "pending"
    /// reads as a query error, so it can be set without a rebuild
    /// (`transports/memfabric/need_retry_code`).
    pub const NEED_RETRY: Self = Self(1);
    /// The published library answers it also for a peer or a remote range that it
    /// does not know yet \[pub\].
    pub const INVALID_PARAM: Self = Self(-2000);
    /// Out of something, such as threads \[pub\].
    pub const NEW_OBJECT_FAILED: Self = Self(-2002);
    /// `smem_trans_init` was already called in this process \[pub\].
    pub const REPEAT_CALL: Self = Self(-2005);
    /// No such batch \[pub\].
    pub const OBJECT_NOT_EXISTS: Self = Self(-2007);
    /// What a result slot holds before the library writes to it. No code of
    /// the library, so a result that was never written names itself.
    pub const UNWRITTEN: Self = Self(i32::MIN);
    /// Of a batch that was never given to the library. No code of the library.
    pub const NOT_SUBMITTED: Self = Self(i32::MIN + 1);

    /// Whether this is success.
    pub fn is_ok(self) -> bool {
        self == Self::OK
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::UNWRITTEN {
            return f.write_str("no result written by the library");
        }
        if *self == Self::NOT_SUBMITTED {
            return f.write_str("never given to the library");
        }
        match NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((number, name)) => write!(f, "{name} ({number})"),
            None => write!(f, "unknown code ({})", self.0),
        }
    }
}
