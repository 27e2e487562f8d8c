// SPDX-License-Identifier: Apache-2.0
//! Where scripted calls wait for `mf_emu_release`.

use parking_lot::{Condvar, Mutex};

use crate::record::{self, Counter};

static RELEASES: Mutex<u64> = Mutex::new(0);
static RELEASED: Condvar = Condvar::new();

/// Waits for the next release.
pub(crate) fn wait() {
    let mut releases = RELEASES.lock();
    let entered = *releases;
    record::add(Counter::blocked, 1);
    while *releases == entered {
        RELEASED.wait(&mut releases);
    }
    record::subtract(Counter::blocked, 1);
}

/// Lets everybody go who waits now.
pub(crate) fn release() {
    *RELEASES.lock() += 1;
    RELEASED.notify_all();
}
