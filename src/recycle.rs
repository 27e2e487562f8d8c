// SPDX-License-Identifier: Apache-2.0
//! Storage of freed sub-batches and of vendor batches that are done, kept so that
//! the steady state allocates nothing.

use std::sync::Arc;

use crate::batch::{Table, VendorBatch};

/// Room that is kept, in tasks and in pieces each.
const KEPT_TASKS: usize = 1 << 16;
/// Tables of 1, 2, 4, … tasks, up to all that is kept.
const SIZES: usize = KEPT_TASKS.ilog2() as usize + 1;

/// See the module. Constant time, whatever came before: what is over the limit
/// pushes something out that was kept.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// By the logarithm of their room. In boxes, for a table is large and moves
    /// between sub-batches.
    #[expect(clippy::vec_box)] // see above
    tables: [Vec<Box<Table>>; SIZES],
    tasks: usize,
    batches: Vec<Arc<VendorBatch>>,
    pieces: usize,
}

impl Kept {
    /// The room of a table for `capacity` tasks, whether kept or made: rounded up,
    /// so that one that was freed fits the next of its kind, and no small request
    /// takes a large table.
    pub(crate) fn room_for(capacity: usize) -> usize {
        match capacity {
            0 => 0,
            capacity => capacity.next_power_of_two(),
        }
    }

    /// A table for `capacity` tasks, if one is kept.
    pub(crate) fn table(&mut self, capacity: usize) -> Option<Box<Table>> {
        let room = Self::room_for(capacity);
        let size = room.checked_ilog2()? as usize;
        let table = self.tables.get_mut(size)?.pop()?;
        self.tasks -= room;
        Some(table)
    }

    /// Keeps a table that was cleared.
    pub(crate) fn keep_table(&mut self, table: Box<Table>) {
        let room = table.room();
        let Some(size) = room.checked_ilog2().map(|size| size as usize) else {
            return;
        };
        if room != Self::room_for(room) || size >= SIZES {
            return;
        }
        while self.tasks + room > KEPT_TASKS {
            let most = |size: &usize| self.tables[*size].len() << size;
            let fullest = (0..SIZES).max_by_key(most).unwrap_or(size);
            if fullest == size || self.tables[fullest].pop().is_none() {
                return;
            }
            self.tasks -= 1 << fullest;
        }
        self.tasks += room;
        self.tables[size].push(table);
    }

    /// A batch that nobody else holds, to be filled.
    pub(crate) fn batch(&mut self) -> Arc<VendorBatch> {
        let Some(batch) = self.batches.pop() else {
            return Arc::default();
        };
        self.pieces -= Self::pieces(&batch);
        batch
    }

    /// Keeps a batch if nobody else holds it, and answers whether nobody does.
    pub(crate) fn keep_batch(&mut self, mut batch: Arc<VendorBatch>) -> bool {
        let Some(unique) = Arc::get_mut(&mut batch) else {
            return false;
        };
        unique.renew();
        let room = Self::pieces(unique);
        if room > KEPT_TASKS {
            return true;
        }
        while self.pieces + room > KEPT_TASKS && !self.batches.is_empty() {
            // The oldest, or one of the oldest.
            let oldest = self.batches.swap_remove(0);
            self.pieces -= Self::pieces(&oldest);
        }
        self.pieces += room;
        self.batches.push(batch);
        true
    }

    /// What it counts as; at least one, as the batch itself has a size.
    fn pieces(batch: &VendorBatch) -> usize {
        batch.copy.room().max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(tasks: usize) -> Box<Table> {
        Table::with_room_for(tasks).expect("a little memory")
    }

    #[test]
    fn b02_a_pool_full_of_small_tables_takes_larger_ones() {
        let mut kept = Kept::default();
        for _ in 0..2 * KEPT_TASKS {
            kept.keep_table(table(1));
        }
        assert_eq!(kept.tasks, KEPT_TASKS);
        for size in [2, 128, 1024] {
            assert!(kept.table(size).is_none());
            kept.keep_table(table(size));
            assert_eq!(kept.table(size).map(|table| table.room()), Some(size));
            kept.keep_table(table(size));
        }
        assert!(kept.tasks <= KEPT_TASKS);
        // The larger it gets, the more of the small ones go.
        kept.keep_table(table(KEPT_TASKS));
        assert!(kept.table(KEPT_TASKS).is_some());
        assert_eq!(kept.tasks, 0);
    }

    #[test]
    fn b09_a_small_request_takes_no_large_table() {
        let mut kept = Kept::default();
        kept.keep_table(table(KEPT_TASKS));
        assert!(kept.table(1).is_none());
        assert!(kept.table(KEPT_TASKS / 2).is_none());
        assert!(kept.table(KEPT_TASKS - 1).is_some());
    }

    #[test]
    fn b02_the_latest_batches_are_kept_and_not_the_first() {
        let mut kept = Kept::default();
        let batch = |pieces| {
            let mut batch = VendorBatch::default();
            for _ in 0..pieces {
                batch.copy.push(1, 1, 1);
            }
            Arc::new(batch)
        };
        for _ in 0..2 * KEPT_TASKS {
            assert!(kept.keep_batch(batch(1)));
        }
        assert!(kept.pieces <= KEPT_TASKS);
        assert!(kept.keep_batch(batch(1024)));
        assert!(kept.batch().copy.room() >= 1024);
        assert!(kept.keep_batch(batch(KEPT_TASKS + 1)), "and not kept");
        assert!(kept.pieces <= KEPT_TASKS);
        let held = batch(1);
        assert!(!kept.keep_batch(Arc::clone(&held)));
    }
}
