//! The initiator: its transport, its target, and the replay between them.

use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use indicatif::ProgressBar;
use memfabric_transport::{Backend, Error, SmemBackend, Transport};

use super::emulator::Emulator;
use super::interrupt::Interrupt;
use super::lane::{Lane, RawLane, TransportLane};
use super::memory::Memory;
use super::message::Verified;
use super::problem::Problem;
use super::remote::Target;
use super::settings::Chosen;
use super::side::{Side, Sizes, Totals};
use super::trace::Source;

/// Requests of a slice: what one side replays before it is the other's turn.
const SLICE: usize = 20;

/// Two processes that are connected.
pub struct Session {
    target: Target,
    emulator: Option<Emulator>,
    /// Dropped by [`Session::close`] alone: a library that may still use its
    /// memory must not lose it, so whatever else ends a session leaks this.
    link: ManuallyDrop<Link>,
    /// Throughput of the transport by that of the raw calls, for each slice.
    ratios: Vec<f64>,
}

/// What the library works on.
struct Link {
    /// The transport's, then the raw one if there is one.
    sides: Vec<Side>,
    transport: Arc<Transport>,
    // Last, so that the instance ends when nobody uses it any more.
    _backend: Arc<SmemBackend>,
}

impl Session {
    /// Brings the library up in this process and starts the target with
    /// `arguments`; `sides` is 1, or 2 for a raw side.
    pub fn open(
        chosen: &Chosen,
        sizes: Sizes,
        sides: usize,
        arguments: &[OsString],
        interrupt: &Interrupt,
    ) -> Result<Self, Problem> {
        // One instance for both sides: the library is not at its best with two
        // in a process.
        let backend = Arc::new(SmemBackend::open(&chosen.config)?);
        let transport = Arc::new(Transport::new());
        transport.install_backend(
            Arc::clone(&backend) as Arc<dyn Backend>,
            chosen.config.timeout,
        )?;
        let mut target = Target::start(arguments)?;
        let offer = target.offer(interrupt)?;

        let mut made = Vec::with_capacity(sides);
        let mut regions = Vec::new();
        for (index, pool) in offer.pools.iter().enumerate() {
            let lane: Box<dyn Lane> = match index {
                0 => Box::new(TransportLane::new(
                    Arc::clone(&transport),
                    &offer.endpoint,
                    sizes.in_flight,
                )),
                _ => Box::new(RawLane::new(
                    Arc::clone(&backend),
                    offer.endpoint,
                    chosen.config.timeout,
                    sizes.in_flight,
                )),
            };
            let staging = (0..sizes.in_flight)
                .map(|_| Memory::new(sizes.blocks_per_sub_batch, sizes.block_bytes))
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| Problem::BadInput(format!("no memory for staging: {error}")))?;
            regions.extend(staging.iter().map(Memory::region));
            made.push(Side::new(
                lane,
                *pool,
                sizes,
                staging,
                chosen.config.timeout,
            ));
        }
        // From here on the library may use the staging memory.
        let link = ManuallyDrop::new(Link {
            sides: made,
            transport,
            _backend: backend,
        });
        link.transport.register(&regions)?;
        Ok(Self {
            target,
            emulator: chosen.emulator,
            link,
            ratios: Vec::new(),
        })
    }

    /// Replays the trace, on both sides in turn if there are two.
    pub fn play(
        &mut self,
        source: &Source,
        requests: u64,
        interrupt: &Interrupt,
        bar: &ProgressBar,
    ) -> Result<(), Problem> {
        let mut requests = source.requests(requests)?;
        if self.link.sides.len() == 1 {
            self.stretch(0, requests, interrupt, bar)?;
            return Ok(());
        }
        let mut order = [0, 1];
        loop {
            let slice: Vec<_> = requests.by_ref().take(SLICE).collect::<Result<_, _>>()?;
            if slice.is_empty() {
                return Ok(());
            }
            let mut rates = [0.0; 2];
            for side in order {
                rates[side] = self.stretch(side, slice.iter().map(Ok), interrupt, bar)?;
            }
            // What slows the machine down for a while hits both of a pair.
            if rates.iter().all(|rate| rate.is_normal()) {
                self.ratios.push(rates[0] / rates[1]);
            }
            order.reverse();
        }
    }

    /// Replays `requests` on one side, to the end; the answer is bytes a second.
    fn stretch<R: AsRef<[u64]>>(
        &mut self,
        side: usize,
        requests: impl Iterator<Item = Result<R, Problem>>,
        interrupt: &Interrupt,
        bar: &ProgressBar,
    ) -> Result<f64, Problem> {
        let Self { target, link, .. } = self;
        let side = &mut link.sides[side];
        let before = (side.totals().bytes(), side.totals().elapsed);
        side.timed(self.emulator, |side| {
            for request in requests {
                let failures = side.totals().failed_tasks;
                side.request(request?.as_ref(), interrupt)?;
                if side.totals().failed_tasks > failures {
                    target.check()?;
                }
                bar.inc(1);
            }
            side.settle(interrupt)
        })?;
        let elapsed = side.totals().elapsed.saturating_sub(before.1);
        Ok((side.totals().bytes() - before.0) as f64 / elapsed.as_secs_f64())
    }

    /// Submits nothing more and waits for what is in flight.
    pub fn quiesce(&mut self) -> Result<(), Error> {
        let emulator = self.emulator;
        let mut outcome = Ok(());
        // Every side is waited for, also after one that failed.
        for side in &mut self.link.sides {
            outcome = outcome.and(side.timed(emulator, Side::quiesce));
        }
        outcome
    }

    /// Has the target compare every block that its pools should hold. Only when
    /// nothing is in flight.
    pub fn verify(&mut self) -> Result<Verified, Problem> {
        for (pool, side) in self.link.sides.iter().enumerate() {
            self.target.verify(pool, side.residents())?;
        }
        self.target.verified()
    }

    /// What each side did.
    pub fn totals(&self) -> Vec<Totals> {
        let sides = self.link.sides.iter();
        sides.map(|side| side.totals().clone()).collect()
    }

    /// The median over the slices of the transport's throughput by the raw one's.
    pub fn ratio(&self) -> Option<f64> {
        let mut ratios = self.ratios.clone();
        ratios.sort_by(f64::total_cmp);
        let middle = ratios.len() / 2;
        match ratios.len() {
            0 => None,
            count if count % 2 == 0 => Some((ratios[middle - 1] + ratios[middle]) / 2.0),
            _ => Some(ratios[middle]),
        }
    }

    /// Pairs of slices that [`Session::ratio`] is the median of.
    pub fn pairs(&self) -> usize {
        self.ratios.len()
    }

    /// Takes everything down, this process first, and tells the violations that
    /// the target counted. Only after [`Session::quiesce`] succeeded.
    pub fn close(self) -> Result<Vec<String>, Problem> {
        let link = ManuallyDrop::into_inner(self.link);
        let staging: Vec<_> = link.sides.iter().flat_map(Side::regions).collect();
        for region in staging {
            link.transport.deregister(region)?;
        }
        link.transport.uninstall()?;
        drop(link);
        self.target.leave()
    }
}
