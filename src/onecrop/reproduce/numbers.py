"""The numbers that the paper prints, table by table, in its own order. Checked against its source by a test.

Cao and Wu, "On Improving the Algorithm-, Model-, and Data-Efficiency of Self-Supervised Learning".
"""

# Table 1: hours on four K80 and MB of GPU memory, both on CIFAR-10; accuracy on CIFAR-10, CIFAR-100, Tiny-ImageNet
CIFAR_RESULT = {
    "resnet18": {
        "byol": (11.94, 2897, 89.3, 62.6, 32.6),
        "jigclu": (11.59, 2344, 88.7, 55.3, 33.4),
        "simsiam": (7.16, 2501, 90.7, 65.5, 37.1),
        "simclr": (6.63, 2185, 89.4, 59.2, 37.6),
        "moco": (6.54, 1757, 88.9, 62.5, 35.8),
        "pid": (6.53, 3639, 89.8, 63.6, 36.8),
        "npid": (4.15, 1879, 80.8, 50.9, 27.3),
        "sid": (3.36, 1715, 91.1, 67.9, 39.7),
    },
    "mobilenet_v2": {
        "byol": (12.61, 4503, 88.1, 61.2, 28.7),
        "simsiam": (9.36, 4275, 86.1, 50.0, 20.5),
        "simclr": (8.95, 4061, 88.9, 62.4, 23.6),
        "moco": (8.12, 2599, 83.3, 51.6, 21.3),
        "sid": (3.95, 2181, 88.7, 65.5, 36.2),
    },
    "resnet50": {
        "byol": (31.08, 9435, 90.3, 66.7, 41.1),
        "simsiam": (22.32, 9139, 90.9, 64.3, 39.3),
        "simclr": (21.94, 8951, 91.5, 66.2, 42.8),
        "moco": (14.72, 5373, 90.2, 66.5, 42.2),
        "sid": (10.75, 5095, 92.0, 71.6, 44.9),
    },
}

# Table 2: method, images of ImageNet, epochs -> hours, AP50, AP and AP75 on VOC 07+12, accuracy on Tiny-ImageNet
SUBSET_DETECTION = {
    "resnet18": {
        ("untrained", 0, 0): (0, 59.2, 32.5, 31.5, 0.5),
        ("moco", 10_000, 200): (0.43, 61.8, 34.3, 33.4, 9.7),
        ("sid", 10_000, 200): (0.28, 67.1, 38.5, 37.8, 19.4),
        ("moco", 10_000, 800): (1.72, 65.0, 37.2, 37.0, 13.7),
        ("sid", 10_000, 800): (1.12, 68.5, 39.8, 39.8, 20.5),
        ("moco", 100_000, 200): (4.33, 70.6, 41.6, 42.7, 23.6),
        ("simsiam", 100_000, 200): (4.47, 71.1, 42.5, 44.3, 24.3),
        ("sid", 100_000, 200): (2.81, 71.8, 43.1, 44.7, 29.5),
        ("moco", 100_000, 800): (17.32, 72.7, 43.6, 45.3, 27.4),
        ("sid", 100_000, 800): (11.24, 73.4, 44.8, 47.0, 32.4),
    },
    "resnet50": {
        ("untrained", 0, 0): (0, 63.0, 36.7, 36.9, 0.5),
        ("moco", 10_000, 800): (1.88, 71.6, 43.9, 45.9, 23.6),
        ("sid", 10_000, 800): (1.64, 76.8, 49.3, 53.6, 26.3),
        ("moco", 100_000, 200): (4.65, 76.2, 48.0, 51.6, 35.3),
        ("simsiam", 100_000, 200): (5.42, 76.4, 49.8, 54.2, 30.5),
        ("sid", 100_000, 200): (4.09, 78.2, 51.1, 55.7, 36.3),
        ("moco", 100_000, 800): (18.62, 78.7, 51.5, 56.3, 43.7),
        ("sid", 100_000, 800): (16.36, 79.7, 53.3, 58.8, 44.3),
    },
}

# Tables 3 and 9: backbone, method -> for 10,000, 100,000 and all images of ImageNet: accuracy on CIFAR-100, on
# CIFAR-10, hours on eight 3090. On all images the paper quotes MoCo v2's accuracy from another paper.
SMALL_NETS = {
    ("mobilenet_v3_small", "moco"): ((21.8, 50.2, 0.42), (33.0, 64.7, 4.18), (40.4, 70.0, 53.55)),
    ("mobilenet_v3_small", "sid"): ((34.0, 63.5, 0.34), (39.9, 67.1, 3.43), (44.3, 70.7, 43.94)),
    ("mobilenet_v3_large", "moco"): ((28.1, 54.7, 0.42), (32.5, 62.5, 4.23), (42.4, 72.9, 54.19)),
    ("mobilenet_v3_large", "sid"): ((31.5, 59.9, 0.38), (36.1, 64.5, 3.79), (50.1, 74.8, 48.56)),
    ("efficientnet_b0", "moco"): ((26.0, 51.7, 0.43), (34.8, 66.4, 4.31), (43.2, 72.0, 55.22)),
    ("efficientnet_b0", "sid"): ((38.1, 65.6, 0.39), (39.9, 69.1, 3.87), (47.8, 73.1, 49.56)),
    ("resnet18", "moco"): ((39.9, 64.8, 0.43), (51.7, 73.7, 4.33), (54.0, 81.5, 55.47)),
    ("resnet18", "sid"): ((48.8, 73.8, 0.28), (55.3, 78.0, 2.81), (60.4, 82.9, 36.05)),
}
SUBSETS = (10_000, 100_000, None)  # None: all 1,281,167

# Table 4: AP50, AP, AP75 on VOC 07, VOC 07+12, of COCO's boxes and of its masks; ResNet-50. All but `sid` are quoted.
TRANSFER = {
    "scratch": (35.9, 16.8, 13.0, 60.2, 33.8, 33.1, 44.0, 26.4, 27.8, 46.9, 29.3, 30.8),
    "ImageNet supervised": (74.4, 42.4, 42.7, 81.3, 53.5, 58.8, 58.2, 38.2, 41.2, 54.7, 33.3, 35.2),
    "SimCLR": (75.9, 46.8, 50.1, 81.8, 55.5, 61.4, 57.7, 37.9, 40.9, 54.6, 33.3, 35.3),
    "MoCo v2": (77.1, 48.5, 52.5, 82.3, 57.0, 63.3, 58.8, 39.2, 42.5, 55.5, 34.3, 36.6),
    "BYOL": (77.1, 47.0, 49.9, 81.4, 55.3, 61.1, 57.8, 37.9, 40.9, 54.3, 33.2, 35.0),
    "SwAV": (75.5, 46.5, 49.6, 81.5, 55.4, 61.4, 57.6, 37.6, 40.3, 54.2, 33.1, 35.1),
    "SimSiam": (75.5, 47.0, 50.2, 82.0, 56.4, 62.8, 57.5, 37.9, 40.9, 54.2, 33.2, 35.2),
    "sid": (75.5, 47.5, 51.4, 82.0, 56.5, 62.6, 58.1, 38.4, 41.3, 54.8, 33.6, 35.9),
}

# Table 5: AP50, AP, AP75 of COCO's boxes and masks; ResNet-18. All but `sid` are quoted.
TRANSFER_R18 = {
    "MoCo v2": (53.9, 35.0, 37.7, 51.1, 31.0, 33.1),
    "SEED, taught by R-50": (54.2, 35.3, 37.8, 51.1, 31.1, 33.2),
    "SEED, taught by R-101": (54.3, 35.3, 37.9, 51.3, 31.3, 33.4),
    "sid": (54.2, 35.2, 37.9, 51.2, 31.4, 33.5),
}

# Table 6: Feature Calibrate, SqrtKL, Grad Update -> accuracy on CIFAR-10, Tiny-ImageNet
ABLATION = {
    (False, False, False): (88.8, 35.8),
    (True, False, False): (89.4, 36.9),
    (True, False, True): (90.0, 37.5),
    (True, True, False): (91.1, 38.9),
    (True, True, True): (91.1, 39.7),
}

# Table 7: accuracy on ImageNet, ResNet-50. All but `sid` are quoted.
IMAGENET_LINEAR = {
    "Colorization": 39.6,
    "JigPuz": 45.7,
    "DeepCluster": 48.4,
    "NPID": 54.0,
    "BigBiGan": 56.6,
    "LA": 58.8,
    "SeLa": 61.5,
    "CPCv2": 63.8,
    "JigClu": 66.4,
    "sid": 64.5,
    "MoCo": 60.6,
    "PIRL": 63.6,
    "SimCLR": 64.3,
    "PCL": 65.9,
    "MoCo v2": 67.7,
}

# Table 8: the self-distillation term -> accuracy on CIFAR-10
KL_PARTS = {"none": 88.8, "l1": 90.7, "l2": 89.8, "sqrt": 91.1}
