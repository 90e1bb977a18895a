"""The levels of the Pod Security Standards as this cluster can enforce them: Kubernetes 1.20 has PodSecurityPolicy for it, and no labels.

What they say is what the standard says of pods on Linux. A user is held to a level by being allowed to use its policy and no other.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
_DEFAULT_CAPABILITIES = [
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
]
_VOLUMES = ["configMap", "csi", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"]
_SECCOMP = "seccomp.security.alpha.kubernetes.io/allowedProfileNames"


def _policy(name: str, seccomp: str, **spec: Any) -> Object:
    anyone = {"rule": "RunAsAny"}
    return {
        "apiVersion": "policy/v1beta1",
        "kind": "PodSecurityPolicy",
        "metadata": {"name": name, "annotations": {_SECCOMP: seccomp}},
        "spec": {"runAsUser": anyone, "seLinux": anyone, "supplementalGroups": anyone, "fsGroup": anyone, **spec},
    }


PRIVILEGED = _policy(
    "privileged",
    "*",
    **{"privileged": True, "allowPrivilegeEscalation": True, "allowedCapabilities": ["*"], "volumes": ["*"]},
    **{"hostNetwork": True, "hostPID": True, "hostIPC": True, "hostPorts": [{"min": 0, "max": 65535}]},
)
"""What the cluster's administrator may use, for everything else that runs in it."""
BASELINE = _policy(
    "baseline",
    "runtime/default,localhost/*",
    **{"privileged": False, "allowPrivilegeEscalation": True, "allowedCapabilities": _DEFAULT_CAPABILITIES},
    **{"volumes": [*_VOLUMES, "nfs", "iscsi", "cephFS"], "hostNetwork": False, "hostPID": False, "hostIPC": False},
)
RESTRICTED = _policy(
    "restricted",
    "runtime/default,localhost/*",
    **{"privileged": False, "allowPrivilegeEscalation": False, "requiredDropCapabilities": ["ALL"], "volumes": _VOLUMES},
    **{"hostNetwork": False, "hostPID": False, "hostIPC": False, "runAsUser": {"rule": "MustRunAsNonRoot"}},
)
