//! Creates the source `vmm`: checks what the driver, the device and the machine support, and tests one granule.

use std::ffi::c_int;
use std::sync::Arc;

use super::super::options::PinOptions;
use super::super::register::RegisterSource;
use super::super::trial;
use super::VmmSource;
use super::location::{HostLocation, Machine};
use super::table::GranuleTable;
use crate::driver::calls;
use crate::driver::device::Device;
use crate::driver::vmm::{self as driver, MemoryLocation, attribute};
use crate::error::SourceError;
use pinpool_os::host::GRANULE_BYTES;
use pinpool_os::sync::unmodeled::AtomicBool;

impl VmmSource {
    /// Finds a driver with virtual host memory and the device number `ordinal`, and tests a granule: commits it, copies from it
    /// if the device has a context, and releases it. Granules come from the NUMA node `node`, else from the device's node, else
    /// from any memory of the host.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, or one of them lacks this ability; the error names the step that was refused.
    pub fn new(ordinal: u32, node: Option<u32>) -> Result<Self, SourceError> {
        Self::for_pool(&PinOptions::new(ordinal, node), true)
    }

    /// Creates the source as [`new`](Self::new) does, for a pool with these options. If the user did not name the
    /// source (`is_named`), also fails on machines on which the driver may terminate the process.
    pub(in crate::backend) fn for_pool(options: &PinOptions<'_>, is_named: bool) -> Result<Self, SourceError> {
        let PinOptions { root, node, max_bytes, .. } = *options;
        let device = Device::find(options.device)?;
        let has = |number| device.attribute(number).is_some_and(|value| value != 0);
        let lacks = |what: &str, number: c_int| {
            SourceError::new("cuDeviceGetAttribute", format!("{what} (attribute {number})"))
        };
        if !has(attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
            let what = "the device does not support virtual memory management";
            return Err(lacks(what, attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED));
        }
        let has_nodes = has(attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        let has_host = has(attribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
        if !has_nodes && !has_host {
            let what = "the driver or the device does not support cuMemCreate on the host";
            return Err(lacks(what, attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED));
        }
        if let Some(name) = driver::missing() {
            return Err(SourceError::new("dlsym", format!("the driver has no {name}; it is too old")));
        }
        let of_driver = || device.attribute(attribute::HOST_NUMA_ID).and_then(|node| u32::try_from(node).ok());
        let wanted = node.or_else(|| device.numa_node(root)).or_else(of_driver);
        let machine = Machine::read(root, calls::driver_version().unwrap_or(0));
        let locations = machine.locations(wanted, is_named).map_err(|why| SourceError::new("vmm", why))?;
        let mut refused: Option<SourceError> = None;
        let is_supported = |location: &HostLocation| if location.is_none() { has_host } else { has_nodes };
        for location in locations.into_iter().filter(is_supported) {
            let reserves = Arc::new(RegisterSource::on_device(device.clone(), location.or(wanted), options));
            match Self::at(location, device.clone(), reserves, max_bytes) {
                Ok(source) => return Ok(source),
                Err(error) => refused = Some(refused.map_or(error.clone(), |first| first.and_also(&error))),
            }
        }
        Err(refused.unwrap_or_else(|| {
            let why = machine.lack_of(wanted).unwrap_or_else(|| "no NUMA node has both memory and CPUs".to_owned());
            let what = format!("{why}, and the driver cannot allocate host memory without a node");
            lacks(&what, attribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        }))
    }

    /// Returns a source for this location, after it has passed its trial.
    fn at(
        location: HostLocation,
        device: Arc<Device>,
        reserves: Arc<RegisterSource>,
        max_bytes: Option<u64>,
    ) -> Result<Self, SourceError> {
        let node = MemoryLocation::host(location);
        let granularity = driver::granularity(node)?;
        if granularity == 0 || !GRANULE_BYTES.is_multiple_of(granularity) {
            let what = format!("granules of {granularity} bytes do not fit {GRANULE_BYTES} bytes");
            return Err(SourceError::new("cuMemGetAllocationGranularity", what));
        }
        let devices = u32::try_from(calls::device_count()?).unwrap_or(1);
        let granules = GranuleTable::new(device.clone(), node, devices);
        let cannot_register = device.attribute(attribute::HOST_REGISTER_SUPPORTED) == Some(0);
        let cannot_register = AtomicBool::new(cannot_register);
        let mut source = Self {
            device,
            location: node,
            makes_context: false,
            ids: Default::default(),
            granules,
            unreleased: Default::default(),
            old_places: Default::default(),
            reserves,
            cannot_register,
            untested: None,
        };
        let trial = trial::run(&source, source.device.is_active().then_some(source.device.ordinal), max_bytes)?;
        source.untested = trial.and_then(|trial| trial.untested);
        source.makes_context = true;
        Ok(source)
    }
}
