"""Folders that look like a board's /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOURTH: Mapping[str, bytes | str] = {
    "proc/device-tree/model": b"Raspberry Pi 4 Model B Rev 1.4\0",
    "proc/device-tree/serial-number": b"10000000abcdef01\0",
    "proc/sys/kernel/random/boot_id": "4f1f0c7e-0000-4000-8000-000000000001\n",
    "proc/uptime": "3601.25 14000.00\n",
    "proc/mounts": (
        "rootfs / rootfs rw 0 0\n"
        "/dev/mmcblk0p2 / ext4 rw,noatime 0 0\n"
        "/dev/mmcblk0p1 /boot/firmware vfat ro,relatime 0 0\n"
    ),
    "etc/os-release": 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "sys/devices/system/cpu/cpu0/online": "1\n",
    "sys/devices/system/cpu/cpu1/online": "1\n",
    "sys/devices/system/cpu/cpufreq/boost": "0\n",
    "sys/devices/platform/soc/soc:firmware/get_throttled": "50005\n",
    "sys/class/hwmon/hwmon0/name": "cpu_thermal\n",
    "sys/class/hwmon/hwmon0/temp1_input": "48312\n",
    "sys/class/hwmon/hwmon1/name": "rpi_volt\n",
    "sys/class/hwmon/hwmon1/in0_lcrit_alarm": "1\n",
    "sys/class/hwmon/hwmon2/name": "nvme\n",
    "sys/class/hwmon/hwmon2/temp1_input": "61850\n",
    "sys/class/hwmon/hwmon2/temp1_label": "Composite\n",
    "sys/class/hwmon/hwmon2/temp1_crit": "84850\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone0/temp": "48312\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "passive\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "80000\n",
    "sys/class/thermal/thermal_zone0/trip_point_1_type": "critical\n",
    "sys/class/thermal/thermal_zone0/trip_point_1_temp": "110000\n",
    "sys/block/mmcblk0/stat": "100 0 2000 50 300 0 4000 70 0 60 120\n",
    "sys/block/mmcblk0/device/type": "SD\n",
    "sys/block/mmcblk1/stat": "1 0 2 0 3 0 4 0 0 0 0 0 0 0 0 0 0\n",
    "sys/block/mmcblk1/device/type": "MMC\n",
    "sys/block/mmcblk1/device/life_time": "0x02 0x0b\n",
    "sys/block/mmcblk1/device/pre_eol_info": "0x02\n",
    "sys/block/mmcblk1boot0/stat": "1 0 2 0 3 0 4 0 0 0 0\n",
    "sys/block/mmcblk1boot0/device/type": "MMC\n",
    "sys/block/loop0/stat": "1 0 2 0 3 0 4 0 0 0 0\n",
    "sys/block/nvme0n1/stat": "1 0 8 0 3 0 16 0 0 0 0\n",
    "sys/block/nvme0n1/device/model": "Fast one\n",
    "proc/1/stat": "1 (systemd) S 0 1 1\n",
    "proc/2/stat": "2 (a) T (b) R 0 1 1\n",
    "proc/3/stat": "3 (kworker/0:0) I 2 0 0\n",
    "proc/4/stat": "4 (dd) D 2 0 0\n",
    "proc/5/stat": "5 (vim) T 2 0 0\n",
    "proc/6/stat": "6 (gdb) t 2 0 0\n",
    "proc/7/stat": "7 (gone) Z 2 0 0\n",
    "proc/self/stat": "8 (not counted) R 0 0 0\n",
}


def plant(root: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root
